"""The three daemons as twistd subcommands; module names only, because every twistd on this Python imports this file."""

from twisted.application.service import ServiceMaker

frontend = ServiceMaker(
    "localai-frontend",
    "localai_dist.cli.frontend",
    "Serve the OpenAI-compatible API and hold the workers' tunnels.",
    "localai-frontend",
)
worker = ServiceMaker(
    "localai-worker",
    "localai_dist.cli.worker",
    "Run inference backends on this box and dial out to the frontends.",
    "localai-worker",
)
agent_worker = ServiceMaker(
    "localai-agent-worker",
    "localai_dist.cli.agent",
    "Run agent chats and jobs and dial out to the frontends.",
    "localai-agent-worker",
)
