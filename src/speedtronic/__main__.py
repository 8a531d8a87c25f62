"""`python -m speedtronic`, the same as the `speedtronic` command."""

from speedtronic.cli import entry

if __name__ == "__main__":
    entry()
