"""How Agent Lightning's gateway is started, beside which ours is measured."""

#: Its server, as its own command starts it, on a free port. Connections that rest are kept as long as ours keeps them.
AGENT_LIGHTNING = """
import os, socket, uvicorn
from importlib.resources import files
from omegaconf import OmegaConf
from agentlightning.server.app import create_app
config = OmegaConf.load(str(files("agentlightning") / "config" / "server.yaml"))
config.key, config.default_proxy.model_name = "bench", "policy"
listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # it logs every call; nobody reads that here
settings = uvicorn.Config(create_app(config), log_level="error", access_log=False, timeout_keep_alive=75)
uvicorn.Server(settings).run(sockets=[listener])
"""
