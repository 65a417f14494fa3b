"""Command lines: the daemons' options and first checks, the operator's command, children of a cluster."""
