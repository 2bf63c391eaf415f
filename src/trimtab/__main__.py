"""The `trimtab` command. `--version` is handled before any large import."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    if sys.argv[1:] in (["--version"], ["-V"]):
        from trimtab import __version__

        print(f"trimtab {__version__}")
        return
    from trimtab.cli.app import run

    status = run()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run is over: another Ctrl-C must not change the status
    sys.exit(status)


if __name__ == "__main__":
    main()
