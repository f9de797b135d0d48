"""Engines as processes: how one is started, kept on a leash and cleaned up, and how Ray places many.

    RayFleet ──► Ray ──► WorkerActor ──stdin──► launcher ──► engine (API server ──► EngineCore ──► workers)
                   ▲                               │
    ray_head ──────┘ keeps the head alive          └─ ends and reaps every descendant, unlinks their shared memory

Each box may be killed at any moment. Whoever survives cleans at once; what nobody survived to clean is in an incarnation record, which the
next start of the worker and `clean_leftovers` read. Knows nothing of roles beyond carrying them, of requests, or of KV.
"""
