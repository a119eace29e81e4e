from sinkdlm.cli.entry import main

main()
