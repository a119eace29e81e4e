from sinkdlm.cli import main

main()
