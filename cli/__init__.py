"""The command line, installed as `zeroaccel.cli`; nothing in the package below imports it.

`main` knows the sub-commands by name and imports each when it is used. Starting jobs is `cli/launch/`, launch files are
`cli/config/`; `machine` is the one place that looks at this machine.
"""
