"""`zeroaccel config`: making, changing and explaining launch files.

`questions` is one table, from which the questionnaire (`answers.Walk`, `prompts`), the flags and their checks and the
launch file (`config_file`) are made. `config_command` is the command; `explain`, `convert` and `file_commands` are its
sub-commands.
"""
