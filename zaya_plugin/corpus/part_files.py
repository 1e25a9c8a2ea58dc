# SPDX-License-Identifier: Apache-2.0
"""Tokenise blocks in parallel, each into one part file that appears whole or not at all.

Blocks are handed out and taken back in order, and only a few are in work at a time, so memory does not grow with the
corpus.
A part holds the position where its block ended: a resumed run skips the parts that exist and reads on from there.
"""

import io
import json
import multiprocessing
import os
import re
import signal
import threading
import zipfile
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b
from multiprocessing.connection import wait

import numpy as np

from zaya_plugin.corpus.blocks import Block, BlockReader, Format, Position, Rejected, documents
from zaya_plugin.corpus.chats import ChatEncoder
from zaya_plugin.corpus.chunk_encoder import ChunkEncoder
from zaya_plugin.data.prepared import END
from zaya_plugin.data.tokenizer import open_tokenizer
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.whole_file import write_whole

# Text given to the tokenizer at once. Its encodings take about 120 bytes for each byte of text until they are arrays.
BATCH_CHARACTERS = 1_000_000
# Keys of a part's counts: documents that spell out special tokens, and behind this beginning each of the tokens; blocks
# in which the chat template's marks cover the generation prompt; and behind UNUSED keys of messages that the chat
# template does not use.
SPELLED, MARKED_PROMPT, UNUSED = "special tokens in the text ", "marked prompts", "unused key "
DAMAGED = (ValueError, KeyError, EOFError, zipfile.BadZipFile)  # by np.load, of a file that is not whole


@dataclass(frozen=True)
class Job:
    """The settings of a worker, which it needs in addition to its block.

    before, behind: token ids around each document; of chats `behind` alone. special: special tokens whose occurrences
    in the text are counted. dtype is the name of the token dtype;
    deduplicate is None, "text" or "id".
    """

    tokenizer_directory: str
    tokenizer_sha256: str
    form: Format
    before: tuple[int, ...]
    behind: tuple[int, ...]
    special: tuple[str, ...]
    valid_fraction: float
    dtype: str
    deduplicate: str | None = None


@dataclass(frozen=True)
class Part:
    """A finished part file. end: where its block ended; resumed: whether an earlier run made it."""

    path: str
    counts: Counter
    rejected: list[Rejected]
    taken: int
    end: Position
    resumed: bool = False

    def arrays(self, *names: str) -> tuple[np.ndarray, ...]:
        """Return arrays of the file.

        For each split: <split>_tokens, ids [tokens]; <split>_lengths, int32 [documents]; of chats <split>_marks, uint8
            [tokens], see zaya_plugin.data.prepared.MARKS. With deduplication, for
            documents in
        order: keys, hashes of what decides, uint64 [documents, 2]; split_numbers, uint8 [documents].

        Raises:
            ValueError: the file does not match its own checksums; it is removed, so that another run makes it again.
        """
        try:
            with np.load(self.path, allow_pickle=False) as arrays:
                return tuple(arrays[name] for name in names)
        except DAMAGED as error:
            os.unlink(self.path)
            raise mistake(
                self.path, problem=f"is damaged ({error}) and was removed", fix="run the same command again"
            ) from error


def split_names(valid_fraction: float) -> tuple[str, ...]:
    """Return the names of the splits."""
    return ("train", "valid") if valid_fraction else ("text",)


def split_of(text: str, valid_fraction: float) -> str:
    """Return the split of a document, from its text alone: stable when documents are added, and copies share a
    split.
    """
    if not valid_fraction:
        return "text"
    number = int.from_bytes(blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")
    return "valid" if number < valid_fraction * 2**64 else "train"


def tokenise(reader: BlockReader, job: Job, directory: str, workers: int) -> Iterator[Part]:
    """Yield the parts of the whole input in order; make those that do not exist.

    Raises:
        OSError: a part cannot be written (disk full); finished ones stay.
        LostFileError: an input file cannot be read.
        concurrent.futures.process.BrokenProcessPool: a worker was killed, most often for memory.
    """
    os.makedirs(directory, exist_ok=True)
    for name in os.listdir(directory):
        if not name.endswith(".part"):
            os.unlink(os.path.join(directory, name))  # left by a worker that was killed
    if workers == 1:
        for path, block, end, done in _plan(reader, directory):
            yield done or tokenise_block(job, block, end, path)
        return
    # spawn, because forking a process that has used tokenizers' threads or imported transformers is not safe.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        under_way = deque()
        for path, block, end, done in _plan(reader, directory):
            under_way.append(
                (lambda part=done: part) if done else pool.submit(tokenise_block, job, block, end, path).result
            )
            if len(under_way) > workers + 2:
                yield under_way.popleft()()
        while under_way:
            yield under_way.popleft()()
    finally:
        pool.shutdown(cancel_futures=True)


def drop_parts(directory: str, file: int) -> None:
    """Remove the parts of the input from file number `file` on."""
    for name in os.listdir(directory):
        part = read_part(os.path.join(directory, name)) if name.endswith(".part") else None
        if part is not None and part.end.file >= file:
            os.unlink(part.path)


def _plan(reader: BlockReader, directory: str) -> Iterator[tuple[str, Block | None, Position | None, Part | None]]:
    """Yield for every part in order its path, and either the block to tokenise and where it ends, or the
    finished part.
    """
    at, number = Position(), 0
    while True:
        path = os.path.join(directory, f"{number:07d}.part")
        done = read_part(path)
        if done is not None:
            at = done.end
            yield path, None, None, done
        else:
            part = reader.read(at)
            if part is None:
                return
            block, at = part
            yield path, block, at, None
        number += 1


def _start_worker() -> None:
    """Leave Ctrl-C to the parent process, and end a worker whose parent was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


@lru_cache(maxsize=1)
def _encoder(directory: str, sha256: str, dtype: str, chat: bool) -> ChunkEncoder | ChatEncoder:
    """Return one encoder for all blocks of a run. sha256 is a key of the cache: another run may reuse the directory."""
    return ChatEncoder(directory) if chat else ChunkEncoder(open_tokenizer(directory), np.dtype(dtype))


def tokenise_block(job: Job, block: Block, end: Position, path: str) -> Part:
    """Write the part of one block."""
    dtype = np.dtype(job.dtype)
    encoder = _encoder(job.tokenizer_directory, job.tokenizer_sha256, job.dtype, job.form.chat)
    names = split_names(job.valid_fraction)
    tokens, marks = ({name: io.BytesIO() for name in names} for _ in range(2))
    lengths = {name: [] for name in tokens}
    counts, rejected, batch, characters, keys, split_numbers = Counter(), [], [], 0, [], []
    before, behind = (np.array(added, dtype).tobytes() for added in (job.before, job.behind))

    def add(text: str, ids: bytes) -> str:
        split = split_of(text, job.valid_fraction)
        length = tokens[split].write(before) + tokens[split].write(ids) + tokens[split].write(behind)
        lengths[split].append(length // dtype.itemsize)
        split_numbers.append(names.index(split))
        return split

    def encode_batch():
        for text, ids in zip(batch, encoder.encode(batch), strict=True):
            add(text, ids)
        batch.clear()

    beginnings = {token[:2] for token in job.special}  # a text is searched quickly for these
    spelled = re.compile("|".join(map(re.escape, job.special)))
    for document in documents(block, job.form, counts):
        if isinstance(document, Rejected):
            rejected.append(document)
            continue
        if job.form.chat:
            try:
                ids, answers = encoder.encode(document.text)
            except ValueError as error:
                rejected.append(document.rejected(str(error)))
                counts["rejected"] += 1
                continue
            if MARKED_PROMPT not in counts:  # depends on the template: one chat of a block tells
                counts[MARKED_PROMPT] = int(encoder.marks_prompt(document.text))
            counts.update(UNUSED + key for key in encoder.unused(document.text))
            split = add(document.text, np.array(ids, dtype).tobytes())
            marks[split].write(bytes(answers) + bytes([END]))
        else:
            batch.append(document.text)
        if any(beginning in document.text for beginning in beginnings):
            inside = Counter(SPELLED + token for token in spelled.findall(document.text))
            counts.update({**inside, SPELLED: int(bool(inside))})
        if job.deduplicate:
            key = document.text if job.deduplicate == "text" else document.id
            keys.append(blake2b(key.encode("utf-8"), digest_size=16).digest())
        characters += len(document.text)
        if characters > BATCH_CHARACTERS:
            encode_batch()
            characters = 0
    if batch:
        encode_batch()

    listed = [asdict(reject) for reject in rejected]
    meta = {"counts": counts, "rejected": listed, "taken": block.taken, "end": asdict(end)}
    arrays = {"meta": np.frombuffer(json.dumps(meta).encode(), np.uint8)}
    for name in tokens:
        arrays[f"{name}_tokens"] = np.frombuffer(tokens[name].getbuffer(), dtype)
        arrays[f"{name}_lengths"] = np.array(lengths[name], np.int32)
        if job.form.chat:
            arrays[f"{name}_marks"] = np.frombuffer(marks[name].getbuffer(), np.uint8)
    if job.deduplicate:
        arrays["keys"] = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
        arrays["split_numbers"] = np.array(split_numbers, np.uint8)
    # In memory first: an archive that meets a full disk in the middle reports that it cannot be closed, not why.
    archive = io.BytesIO()
    np.savez(archive, **arrays)
    write_whole(path, archive.getbuffer())
    return Part(path, counts, rejected, block.taken, end)


def read_part(path: str) -> Part | None:
    """Return the part at a path; None if it does not exist or is cut short (it is then removed and made again)."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            meta = json.loads(arrays["meta"].tobytes())
    except FileNotFoundError:
        return None
    except DAMAGED:
        os.unlink(path)
        return None
    rejected = [Rejected(**entry) for entry in meta["rejected"]]
    return Part(path, Counter(meta["counts"]), rejected, meta["taken"], Position(**meta["end"]), resumed=True)
