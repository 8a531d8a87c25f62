"""How fast this machine is with Speedtronic, and with the same work by hand: the rows of `speedtronic bench`."""
