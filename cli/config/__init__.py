"""`zeroaccel config`: creates, changes and explains launch files.

`questions` is one table for the questionnaire (`answers.Walk`, `prompts`), the flags and their checks, and the launch
file (`config_file`). `config_command` is the command; `explain`, `convert` and `file_commands` have its sub-commands.
"""
