"""The command line, installed as `zeroaccel.cli`; nothing in the package below imports it.

`main` knows the sub-commands by name and imports each when it is used. `launch` is one: it makes a `plan` of what to
start on this `machine`; `agent` starts and watches it, with `stopping` for signals and `orphans` for what stays
behind; every process runs under `runner`, and `failures` says what went wrong.
"""
