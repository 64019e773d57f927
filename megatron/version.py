"""The name and the version of this suite, written once: setup.py reads them here, and --version
prints them."""

NAME = "megatron-gpt-pretraining"
VERSION = "0.1.0"


def version_line(prog: str) -> str:
    """What `--version` of a program prints."""
    return f"{prog} ({NAME}) {VERSION}"
