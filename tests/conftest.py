"""What every test needs: signals as a shell gives them to a command in the foreground."""

from __future__ import annotations

import signal

# A shell that starts a command behind `&` has it ignore Ctrl-C, nohup a lost terminal, and so all that these
# start: the tests that send such a signal would wait for its effect for ever.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
