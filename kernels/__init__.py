"""What is measured: one file, one kernel (the plug-in contract is in docs/design.md)."""
