/* The native loop: runs packed launches and spreads grids over threads; allocates nothing and calls no library.
 *
 * Freestanding C, compiled and loaded like any program. native.py owns the tables below and must match their layout.
 * A launch in the stream is little-endian 32-bit words: program, grid, then its arguments in order: one word for a
 * buffer's id or a 32-bit scalar, two (low first) for a 64-bit scalar, none for the index. Grid 0 is a single call.
 * Ids and lengths come from a stranger and are checked against the tables; what a program does is not this file's worry.
 * A graph's launches are such a stream too, with tables of their own, and `patch` puts a replay's values into it.
 * While a timeline is made, `run_traced` notes when each launch began and ended.
 */
typedef __UINT8_TYPE__ u8;
typedef __UINT16_TYPE__ u16;
typedef __UINT32_TYPE__ u32;
typedef __UINT64_TYPE__ u64;
typedef __INT64_TYPE__ i64;

#define EXPORT __attribute__((visibility("default")))
#define MAX_ARGUMENTS 64

enum { DONE, TRUNCATED, BAD_PROGRAM, PROGRAM_FAILED, BAD_BUFFER, OVERLAP, NO_ROOM };
enum { ABSENT, READY, FAILED };
enum { POINTER, WORD, DOUBLE_WORD, INDEX };

typedef void (*entry)(void **);

struct program {
    entry call;
    u64 writes;       /* bit k: argument k is written */
    u64 indices;      /* bit k: argument k is the index */
    u32 words;        /* words of the arguments */
    u8 state, count, alias, pointers;
    u8 kinds[MAX_ARGUMENTS];
    u8 padding[32];
};

struct buffer {
    u64 address, nbytes; /* address 0: no such buffer */
};

struct state {
    const struct program *programs;
    u64 program_count;
    const struct buffer *buffers;
    u64 buffer_count;
    volatile u64 *progress; /* number of the command being run */
    u64 at;                 /* out: where the launch that stopped the loop starts */
    u64 word;               /* out: which word was wrong */
    u64 launches;           /* out: launches run by this call */
};

/* A record as `wsgrad/transport/tracing.py` has it. */
struct span {
    u16 kind, zero;
    u32 name, queue, graph, step, unused;
    u64 number;
    i64 start, end;
    u64 nbytes;
};

struct trace {
    struct span *spans;
    u64 room;   /* in spans */
    u64 used;   /* in, out */
    u64 graph;  /* 0: `number` is counted up with the launches, else their steps are */
    u64 number; /* of a graph's replay */
};

/* ---- the machine ---- */

#if defined(__x86_64__)
static inline i64 clock_nanoseconds(void) {
    i64 now[2];
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(228), "D"(1L), "S"(now) : "rcx", "r11", "memory");
    return now[0] * 1000000000 + now[1];
}
static inline void pause(void) { __builtin_ia32_pause(); }
static inline long futex(void *address, int operation, u32 value) {
    long result;
    register long timeout __asm__("r10") = 0;
    __asm__ volatile("syscall" : "=a"(result)
                     : "a"(202), "D"(address), "S"((long)operation), "d"((long)value), "r"(timeout)
                     : "rcx", "r11", "memory");
    return result;
}
#elif defined(__aarch64__)
static inline i64 clock_nanoseconds(void) {
    i64 now[2];
    register long number __asm__("x8") = 113;
    register long x0 __asm__("x0") = 1;
    register long x1 __asm__("x1") = (long)now;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(number), "r"(x1) : "memory");
    return now[0] * 1000000000 + now[1];
}
static inline void pause(void) { __asm__ volatile("yield"); }
static inline long futex(void *address, int operation, u32 value) {
    register long number __asm__("x8") = 98;
    register long x0 __asm__("x0") = (long)address;
    register long x1 __asm__("x1") = operation;
    register long x2 __asm__("x2") = value;
    register long x3 __asm__("x3") = 0;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(number), "r"(x1), "r"(x2), "r"(x3) : "memory");
    return x0;
}
#endif

#define WAIT_PRIVATE 128
#define WAKE_PRIVATE 129
#define LOAD(p) __atomic_load_n(p, __ATOMIC_SEQ_CST)
#define STORE(p, v) __atomic_store_n(p, v, __ATOMIC_SEQ_CST)
#define ADD(p, v) __atomic_add_fetch(p, v, __ATOMIC_SEQ_CST)

/* ---- the pool: workers claim chunks of the current grid ---- */

#define SPINS 2000
#define CLOSED 0xffffffffu /* a claim counter that no chunk count reaches */

static struct {
    u32 generation __attribute__((aligned(64)));
    u64 next __attribute__((aligned(64))); /* generation << 32 | next chunk: a late worker can claim nothing newer */
    u32 finished __attribute__((aligned(64)));
    u32 sleeping __attribute__((aligned(64)));
    u32 waiting, stopping, ready;
} pool;

static struct {
    entry call;
    void **slots;
    u64 indices, total, chunk;
    u32 count, chunks;
} current;

static u32 threads = 1;

static void call_range(entry call, void **slots, u64 indices, u64 from, u64 to) {
    for (u64 i = from; i < to; i++) {
        for (u64 left = indices; left; left &= left - 1) *(i64 *)&slots[__builtin_ctzll(left)] = (i64)i;
        call(slots);
    }
}

static void work(u32 generation) {
    for (;;) {
        u64 next = LOAD(&pool.next);
        do {
            if ((u32)(next >> 32) != generation || (u32)next >= current.chunks) return;
        } while (!__atomic_compare_exchange_n(&pool.next, &next, next + 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
        /* Claimed: the grid can't end before this chunk is finished, so `current` stands still. */
        void *slots[MAX_ARGUMENTS];
        for (u32 k = 0; k < current.count; k++) slots[k] = current.slots[k];
        u64 from = (u64)(u32)next * current.chunk, to = from + current.chunk;
        call_range(current.call, slots, current.indices, from, to < current.total ? to : current.total);
        u32 chunks = current.chunks;
        if (ADD(&pool.finished, 1) == chunks && LOAD(&pool.waiting)) futex(&pool.finished, WAKE_PRIVATE, 1);
    }
}

EXPORT void worker(void) {
    u32 generation = LOAD(&pool.generation);
    ADD(&pool.ready, 1);
    while (!LOAD(&pool.stopping)) {
        u32 now, spins = 0;
        while ((now = LOAD(&pool.generation)) == generation && !LOAD(&pool.stopping)) {
            if (++spins < SPINS) {
                pause();
                continue;
            }
            ADD(&pool.sleeping, 1);
            if (LOAD(&pool.generation) == generation) futex(&pool.generation, WAIT_PRIVATE, generation);
            ADD(&pool.sleeping, -1);
            spins = 0;
        }
        generation = now;
        work(generation);
    }
    ADD(&pool.ready, -1);
}

/* How many workers have started and not yet left. */
EXPORT u32 workers(void) { return LOAD(&pool.ready); }

EXPORT void set_threads(u32 count) { threads = count; }

/* Make the workers return; `set_threads(1)` is the caller's to do first. */
EXPORT void stop(void) {
    STORE(&pool.stopping, 1);
    ADD(&pool.generation, 1);
    futex(&pool.generation, WAKE_PRIVATE, 0x7fffffff);
}

EXPORT void start(void) { STORE(&pool.stopping, 0); }

static void run_grid(const struct program *program, void **slots, u64 total) {
    u32 generation = pool.generation + 1;
    /* Close the old claims before `current` changes: a worker that still looks at them must not see the new count. */
    STORE(&pool.next, (u64)generation << 32 | CLOSED);
    current.call = program->call;
    current.slots = slots;
    current.indices = program->indices;
    current.count = program->count;
    current.total = total;
    u64 chunk = total / ((u64)threads * 4);
    current.chunk = chunk ? chunk : 1;
    current.chunks = (u32)((total + current.chunk - 1) / current.chunk);
    STORE(&pool.finished, 0);
    STORE(&pool.next, (u64)generation << 32);
    STORE(&pool.generation, generation);
    if (LOAD(&pool.sleeping)) futex(&pool.generation, WAKE_PRIVATE, threads - 1);
    work(generation);
    u32 done, spins = 0;
    while ((done = LOAD(&pool.finished)) < current.chunks) {
        if (++spins < SPINS) {
            pause();
            continue;
        }
        STORE(&pool.waiting, 1);
        if ((done = LOAD(&pool.finished)) < current.chunks) futex(&pool.finished, WAIT_PRIVATE, done);
        STORE(&pool.waiting, 0);
    }
}

/* ---- the loop ---- */

/* Whether an argument that is written shares bytes with another one. Two written ones that are exactly the same
 * range pass in a program that was declared for it. */
static int overlaps(const struct program *program, void **slots, const u64 *nbytes) {
    for (u64 left = program->writes; left; left &= left - 1) {
        u32 k = (u32)__builtin_ctzll(left);
        if (!nbytes[k]) continue;
        u64 low = (u64)slots[k], high = low + nbytes[k];
        for (u32 j = 0; j < program->count; j++) {
            if (j == k || program->kinds[j] != POINTER || !nbytes[j]) continue;
            u64 other = (u64)slots[j];
            if (other >= high || other + nbytes[j] <= low) continue;
            int same = other == low && nbytes[j] == nbytes[k] && program->writes >> j & 1;
            if (!(same && program->alias)) return 1;
        }
    }
    return 0;
}

/* Runs launches `words[from…]`; the number of the first is `number`. Returns why it stopped. */
static inline __attribute__((always_inline)) int run_launches(
    struct state *state, const u32 *words, u64 count, u64 from, u64 number, struct trace *trace) {
    u64 at = from;
    int result = DONE;
    void *slots[MAX_ARGUMENTS];
    u64 nbytes[MAX_ARGUMENTS];
    state->launches = 0;
    while (at < count) {
        state->at = at;
        state->word = at;
        if (count - at < 2) return TRUNCATED;
        u64 id = words[at], grid = words[at + 1];
        if (id >= state->program_count || state->programs[id].state == ABSENT) return BAD_PROGRAM;
        const struct program *program = &state->programs[id];
        const u32 *word = words + at + 2;
        if (count - at - 2 < program->words) return TRUNCATED;
        for (u32 k = 0; k < program->count; k++) {
            switch (program->kinds[k]) {
            case POINTER:
                if (*word >= state->buffer_count || !state->buffers[*word].address) {
                    state->word = (u64)(word - words);
                    return BAD_BUFFER;
                }
                slots[k] = (void *)state->buffers[*word].address;
                nbytes[k] = state->buffers[*word++].nbytes;
                break;
            case WORD:
                slots[k] = (void *)(u64)*word++;
                break;
            case DOUBLE_WORD:
                slots[k] = (void *)((u64)word[1] << 32 | word[0]);
                word += 2;
                break;
            default:
                slots[k] = 0;
            }
        }
        if (program->state == FAILED) return PROGRAM_FAILED;
        if (program->pointers > 1 && program->writes && overlaps(program, slots, nbytes)) return OVERLAP;
        if (trace && trace->used == trace->room) return NO_ROOM;
        *state->progress = number + state->launches;
        i64 start = trace ? clock_nanoseconds() : 0;
        if (grid <= 1) program->call(slots);
        else if (threads > 1) run_grid(program, slots, grid);
        else call_range(program->call, slots, program->indices, 0, grid);
        if (trace) {
            u64 place = number + state->launches;
            trace->spans[trace->used++] = (struct span){
                .kind = 1, .name = (u32)id, .graph = (u32)trace->graph, .step = trace->graph ? (u32)place : 0,
                .number = trace->graph ? trace->number : place, .start = start, .end = clock_nanoseconds()};
        }
        state->launches++;
        at += 2 + program->words;
    }
    state->at = at;
    return result;
}

EXPORT int run(struct state *state, const u32 *words, u64 count, u64 from, u64 number) {
    return run_launches(state, words, count, from, number, 0);
}

/* The same with a span for each launch; stops with NO_ROOM where none can be noted. */
EXPORT int run_traced(
    struct state *state, const u32 *words, u64 count, u64 from, u64 number, struct trace *trace) {
    return run_launches(state, words, count, from, number, trace);
}

/* ---- graphs ---- */

enum { PATCH_WORD, PATCH_DOUBLE, PATCH_FLOAT32, PATCH_FLOAT64 };

struct patch {
    u32 word, kind, source, zero;
    i64 scale, offset;
};

/* Writes `scale * values[source] + offset` into the words of a graph, as `wsgrad/graph/native.py` made the table. */
EXPORT void patch(u32 *words, const struct patch *patches, u64 count, const i64 *values) {
    for (u64 i = 0; i < count; i++) {
        const struct patch *p = &patches[i];
        u64 value = (u64)p->scale * (u64)values[p->source] + (u64)p->offset;
        union { float f; u32 u; } single;
        union { double f; u64 u; } number;
        u32 *word = words + p->word;
        switch (p->kind) {
        case PATCH_FLOAT32:
            single.f = (float)(double)(i64)value;
            word[0] = single.u;
            continue;
        case PATCH_FLOAT64:
            number.f = (double)(i64)value;
            value = number.u;
            break;
        case PATCH_WORD:
            word[0] = (u32)value;
            continue;
        default:
            break;
        }
        word[0] = (u32)value;
        word[1] = (u32)(value >> 32);
    }
}
