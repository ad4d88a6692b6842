"""Images: pictures as vectors, by the vision tower of a CLIP or SigLIP folder."""
