"""`headrace`, and `python -m headrace.cli` where the script is not on the path: one command in a process of its own."""

import sys

from headrace.cli import interrupts


def entry() -> int:
    """The command's exit code, 130 however often and late Ctrl-C is pressed."""
    interrupts.install()
    try:
        from headrace.cli.main import main

        return main()
    except KeyboardInterrupt:  # the second one, in the instant before the first was dealt with
        return 130
    finally:
        interrupts.ignore()


if __name__ == "__main__":
    sys.exit(entry())
