import sys

from oneemb.compat.runner import main

if __name__ == "__main__":
    main(sys.argv[1:])
