"""Settings, processes, files and signals. All folders use this one, and nothing in it knows of images.

- Settings: `settings` (types, help, files, flags), `synonyms` (names of other tools), `yaml_text`.
- Extensions: `plugins` (registries and entry points).
- Processes: `processes`, `collectives`, `watchdog` (a process that hangs), `preemption` (signals), `machine`.
- Files: `files` (atomic writes), `lock` (one run in a folder).
- People: `user_error` (errors for the user), `progress`, `stdio`, `isolation` (the state of a calling program).
"""
