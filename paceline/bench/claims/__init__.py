"""The measurements behind our promises for `auto`: never slower, follows a change of workload, takes little time."""
