"""Tasks from any tested Python package: `agentenv swe synth`.

A release's functions are mutated one edit at a time (`operators`); its own tests tell which edits are bugs
(`survey`, `bench`, `search`); what failed is put in words (`issue`) and written as rows (`rows`).
"""
