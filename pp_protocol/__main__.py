"""`python -m pp_protocol` is `pp-protocol`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
