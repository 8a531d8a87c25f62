"""Files that survive a crash: durable writes and folders, verified reads, locks, the tensor format."""
