"""The console: the table of commands, those that show and try environments, and what all commands share."""
