"""The processes of a run: start-up, status files, failure detection, signals. Nothing here computes or reduces arrays.

Start-up: runtime, launchers, launch, coordination, memory.
Process group: process_group, stragglers.
Failure detection: supervisor (this process), follower (the others), verdict (the rules of both), status, status_files,
stack_traces.
Signals: preemption.
"""
