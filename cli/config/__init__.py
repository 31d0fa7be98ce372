"""`zeroaccel config`: creates, changes and explains launch files.

The questions stand in the table of settings; `questions` adds their conditions and checks. The questionnaire
(`answers.Walk`, `prompts`), the flags of `config_command` and the launch file (`config_file`) derive from them.
`explain`, `convert` and `file_commands` have the sub-commands.
"""
