"""The processes of a run: start-up, status files, failure detection, signals. Nothing here computes or reduces arrays.

Start-up: runtime, launchers, launch, coordination, host_memory, address_space.
Process group: process_group, processes.
Failure detection: supervisor, status_files, verdict, status, stack_traces, stragglers.
Of a single process: watchdog, hang_rules, hang_monitor.
Signals: preemption.
"""
