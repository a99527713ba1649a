"""Which signals end a process of ours in order. What it then does, and what a second one means, its own room decides."""

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGHUP is one of them: it comes when the terminal is closed, and by itself would end a site without a word, its weights left in shared memory.
    Whoever wants the process to outlive its terminal has it ignored from the start (`nohup`)."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if ignored else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
