"""The XLA compiler: its options, the HLO that it emits, and profiles of compiled steps."""
