Staging costs half the processor time it did: a worker gathers what arrives and hashes and writes it a mebibyte at a time
without copying, its disk begins to write at once and not at the end, and a frontend reads ahead. A large file that nobody
has hashed yet is sent while it is hashed, to workers that know how (`X-Fingerprint-SHA256`).
