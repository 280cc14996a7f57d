/* MPI's messages between ranks that are all in this process, and a list of them. Included after message/message.h; what
 * calls these functions holds the engine's lock. */
#include <string.h>

typedef struct letter letter;
struct letter {
    letter *next;
    int from, tag, bytes;
    char data[];
};

typedef struct {
    int source, to, tag, bytes;
} sent_message;

enum { MOST_RANKS = 1 << 16 };
static letter *boxes[MOST_RANKS]; /* what has come for each rank of each group */
static sent_message *messages;
static int message_count, message_room;

/* A communicator is whose it is: the rank, and how many ranks the groups before have. */
int64_t communicator_of(int before, int rank) { return (int64_t)before << 20 | (rank + 1); }
static int before(mpi_handle comm) { return (int)((intptr_t)comm >> 20); }
static int rank_of(mpi_handle comm) { return (int)((intptr_t)comm & 0xfffff) - 1; }

static int lost_bytes = -1;
void lose_messages_of(int bytes) { lost_bytes = bytes; }

/* Who does not look for its messages, which lie there meanwhile; 2: whose looks fail. */
static char is_deaf[MOST_RANKS];
void set_deaf(int64_t comm, int deaf) {
    mpi_handle of = (mpi_handle)(intptr_t)comm;
    is_deaf[before(of) + rank_of(of)] = (char)deaf;
}

/* Those with more than so many bytes. */
int waiting_messages(int64_t comm, int bytes) {
    int count = 0;
    mpi_handle of = (mpi_handle)(intptr_t)comm;
    for (letter *it = boxes[before(of) + rank_of(of)]; it; it = it->next) count += it->bytes > bytes;
    return count;
}

static void note(sent_message message) {
    if (message_count == message_room) {
        message_room = message_room ? 2 * message_room : 1024;
        messages = realloc(messages, (size_t)message_room * sizeof *messages);
        if (!messages) abort();
    }
    messages[message_count++] = message;
}

static int send_message(const void *buffer, int bytes, mpi_handle type, int to, int tag, mpi_handle comm,
                        mpi_handle *request) {
    *request = NULL;
    if (bytes == lost_bytes) return 0;
    letter *new = __real_malloc(sizeof *new + (size_t)bytes), **end = &boxes[before(comm) + to];
    (void)type;
    if (!new) abort();
    *new = (letter){.from = rank_of(comm), .tag = tag, .bytes = bytes};
    memcpy(new->data, buffer, (size_t)bytes);
    while (*end) end = &(*end)->next;
    *end = new;
    note((sent_message){rank_of(comm), to, tag, bytes});
    return 0;
}

static letter *next_letter(int from, int tag, mpi_handle comm) {
    if (is_deaf[before(comm) + rank_of(comm)]) return NULL;
    for (letter **at = &boxes[before(comm) + rank_of(comm)]; *at; at = &(*at)->next) {
        letter *it = *at;
        if (it->from != from || it->tag != tag) continue;
        *at = it->next;
        return it;
    }
    return NULL;
}

static int find_message(int from, int tag, mpi_handle comm, int *found, mpi_handle *message, mpi_status *status) {
    letter *it = next_letter(from, tag, comm);
    *found = it != NULL;
    *message = it;
    if (it) memcpy(status->bytes, &it->bytes, sizeof it->bytes);
    return is_deaf[before(comm) + rank_of(comm)] == 2;
}

static void open_letter(letter *it, void *buffer, int bytes) {
    if (bytes != it->bytes) abort();
    memcpy(buffer, it->data, (size_t)bytes);
    free(it);
}

static int take_message(void *buffer, int bytes, mpi_handle type, mpi_handle *message, mpi_handle *request) {
    (void)type;
    open_letter(*message, buffer, bytes);
    *message = *request = NULL;
    return 0;
}

/* A receive whose message has not come. */
typedef struct {
    void *buffer;
    int bytes, from, tag;
    mpi_handle comm;
} posted_receive;

static int post_receive(void *buffer, int bytes, mpi_handle type, int from, int tag, mpi_handle comm,
                        mpi_handle *request) {
    posted_receive *posted = __real_malloc(sizeof *posted);
    (void)type;
    if (!posted) abort();
    *posted = (posted_receive){buffer, bytes, from, tag, comm};
    *request = posted;
    return 0;
}

static int cancel_receive(mpi_handle *request) {
    free(*request);
    *request = NULL;
    return 0;
}

static int is_over(mpi_handle *request, int *flag, mpi_status *status) {
    posted_receive *posted = *request;
    letter *it = posted ? next_letter(posted->from, posted->tag, posted->comm) : NULL;
    (void)status;
    if (it) open_letter(it, posted->buffer, posted->bytes);
    if (it) cancel_receive(request);
    *flag = !posted || it;
    return 0;
}

static int length_of(const mpi_status *status, mpi_handle type, int *length) {
    (void)type;
    memcpy(length, status->bytes, sizeof *length);
    return 0;
}

void use_messages_in_one_process(void) {
    mpp_mpi.Isend = send_message;
    mpp_mpi.Improbe = find_message;
    mpp_mpi.Imrecv = take_message;
    mpp_mpi.Test = is_over;
    mpp_mpi.Irecv = post_receive;
    mpp_mpi.Cancel = cancel_receive;
    mpp_mpi.Get_count = length_of;
    mpp_mpi.any_source = -1;
}

/* Those sent since the last call. */
int sent_messages(const sent_message **list) {
    int count = message_count;
    *list = messages;
    message_count = 0;
    return count;
}

/* Of a group of ranks on several nodes: its parts (shm/topology.h). Room for `size` + 1 numbers each. */
int parts_of(int size, const int *node_of, int reproducible, int *members, int *first_in, int *tree_position,
             int *leaf_count, int *regular) {
    mpp_topology *t = mpp_topology_new(size, 0, node_of, reproducible);
    int parts = t->parts;
    memcpy(members, t->members, (size_t)size * sizeof *members);
    memcpy(first_in, t->first_in, ((size_t)parts + 1) * sizeof *first_in);
    memcpy(tree_position, t->tree_position, (size_t)parts * sizeof *tree_position);
    memcpy(leaf_count, t->leaf_count, (size_t)parts * sizeof *leaf_count);
    *regular = t->regular;
    mpp_topology_free(t);
    return parts;
}
