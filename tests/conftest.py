"""What every test needs: signals as a shell gives them to a command in the foreground."""

from __future__ import annotations

import signal

# A shell that starts a command behind `&` has it ignore Ctrl-C, and so all that it starts: the tests that
# interrupt a process would wait for it for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
