from fp8calib.cli import main

main()
