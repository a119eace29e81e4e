from sinkdlm.entry import main

main()
