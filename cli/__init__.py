"""The command line, installed as `zeroaccel.cli`; nothing in the package below imports it.

`main` knows the sub-commands by name and imports each when it is used. `launch` is one, with `plan` (what is to be
started), `agent` (starting and watching it), `runner` (each process) and `failures` (what is said when one fails).
"""
