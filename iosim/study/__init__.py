"""Many runs: products of lists, run on every core of this machine, in a fixed order."""
