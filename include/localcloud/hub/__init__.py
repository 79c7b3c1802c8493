"""A Hugging Face Hub on loopback that real clients accept, with a write side, gated repositories and faults.

`app.create_app` makes the ASGI application; nothing here listens by itself. State lies in `<state_dir>/hub`.
Clients need `HF_HUB_DISABLE_XET=1`: with hf_xet installed they upload through a protocol that is not served
here, and do not fall back.
"""
