"""Environments that ship with agentenv; each sub-package is loaded when one of its environments is made."""
