"""python -m osfl"""

from osfl.cli.main import main

if __name__ == "__main__":
    main()
