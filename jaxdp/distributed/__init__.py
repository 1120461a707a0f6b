"""The processes of a run: start-up, control messages, failure detection, signals. Nothing here computes or reduces arrays.

Start-up: runtime, launchers, launch, process_group, host_memory, address_space.
Connections: connection, listener, handshake, secret, pending_connections.
Control channel: control_client, control_server, control_channel, messages, object_exchange, sync_points, heartbeat.
Failure detection: failure, status, hang_rules, hang_monitor, stack_traces, watchdog, stragglers.
Signals: preemption.
"""
