"""What each node holds: manifests, slices, and how their bytes get there whole.

    slicing.slice_model          one stage's file out of a GGUF
    packing.pack_model           all stages' files and `manifest.json`; packing.make_manifest: the manifest alone
    manifest.Manifest            every byte of a deployment by digest
    verify.verify_dir            -> list[Mismatch]: every bit that is not as it must be
    verification.ensure_verified verify once, then by size, time and a signed record
    store.ShardStore             slices on a node's disk, named by content; fetch, hold, collect
    pieces.PieceSource           where bytes can be read from: a file, a folder, a peer (transport.pieces)

No socket, no process, no heavy library. docs/adr/0041-shards.md has the reasons.
"""
