"""The command line, installed as `zeroaccel.cli`; no other part of the package imports it.

`main` has the table of sub-commands and imports each when it is used. `cli/launch/` starts jobs, `cli/config/` is about
launch files; all facts about this machine come from `machine`.
"""
