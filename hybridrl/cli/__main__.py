"""`python -m hybridrl.cli`."""

from hybridrl.cli import main

if __name__ == "__main__":
    main()
