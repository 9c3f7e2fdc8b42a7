"""`python -m agentenv`: the command line."""

from agentenv.cli import main

raise SystemExit(main())
