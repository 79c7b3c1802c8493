"""`python -m localcloud` is the `localcloud` command."""

from localcloud.cli import main

if __name__ == "__main__":
    main()
