"""`zeroaccel launch`: from flags, environment and launch file to running ranks.

`launch_command` declares the flags, which `typed_settings` reads. `launch_job` resolves all settings, with
`launch_machine` for those that depend on this machine, and makes a `LaunchPlan` (`launch_plan`). `agent` runs the plan
through torch's elastic agent; each rank starts in `runner`. `failures` explains how a job ended, `orphans` ends
processes that it left behind. `ssh` starts the job on the machines of `hostfile`, where `node` runs. This file
imports nothing, so that `python -m zeroaccel.cli.launch.node` imports its module only once.
"""
