"""`python -m pdserve`: the command line."""

from pdserve.cli.main import main

if __name__ == "__main__":
    main()
