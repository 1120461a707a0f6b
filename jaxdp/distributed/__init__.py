"""The processes of a run: start-up, status files, failure detection, signals. Nothing here computes or reduces arrays.

Start-up: runtime, launchers, launch, coordination.
Process group: process_group, stragglers.
Failure detection: watchdog (watches this process), follower (the other processes), verdict (the rules), status, stack_traces.
Signals: signal_handler.
"""
