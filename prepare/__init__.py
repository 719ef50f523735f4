"""The former support of prepare_data.py, until that is rewritten."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    cure = "make .venv with another one, such as python3.12 -m venv .venv"
    sys.stderr.write("error: Python " + sys.version.split()[0] + " is too old, use 3.11 or later: ")
    sys.stderr.write(cure + "\n")
    sys.exit(2)
