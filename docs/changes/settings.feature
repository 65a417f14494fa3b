Every option is a flag, a `LOCALAI_…` variable and a key of a YAML file; secrets come from variables, files or YAML, never from a flag. LocalAI's broker options are accepted and ignored.
