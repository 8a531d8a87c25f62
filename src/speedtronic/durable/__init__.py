"""Files that survive a crash: durable writes, locks, the tensor format, verified reads."""
