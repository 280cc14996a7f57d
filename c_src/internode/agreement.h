/* What the channel of a group on several hosts has beside the memory of this one: who is where, messages to the other
 * hosts, and an agreement with them about what is called. */
#ifndef MPP_HOSTS_H
#define MPP_HOSTS_H

#include "shm/shm.h"

/* A message to or from a rank on another host. What is to come is matched (MPI_Improbe), not posted: one that never
 * comes needs no MPI_Cancel. */
typedef struct {
    mpi_handle request, message;
    char *buffer;
    size_t bytes; /* to be sent; the most to be received, and once it has come, what was */
    int peer, tag, phase;
} mpp_parcel;

/* A chunk under way between the hosts. */
typedef struct {
    int count;
    mpp_parcel *parcels;
    char *memory; /* what it sends and receives, but for what lies in slots */
    size_t used, room;
    int second; /* on its second leg */
} mpp_flight;

struct mpp_hosts {
    int count, here;         /* hosts; the number of this one */
    int *tables;             /* all those below */
    int *first, *members;    /* the ranks on host h: members[first[h]] ... members[first[h + 1] - 1], in order */
    int *host_of, *place_of; /* of a rank: its host, and its number among the ranks there */
    /* What hosts add up by themselves and send each other: of each, one part of the tree of all ranks or several. Host
     * h has those numbered first_part[h] ... first_part[h + 1] - 1, each of them the ranks members[first_in[part]] ...
     * members[first_in[part + 1] - 1]. */
    int parts, *first_part, *first_in;
    int *turn;    /* of a part: its place in the tree's order */
    int *turn_of; /* of the part that begins with a rank; -1: none does */
    int *weight;  /* of the part whose turn it is: see add_tree */
    int regular;  /* hosts are the leaves of a balanced tree, one part each */
    int lanes;    /* the smallest number of ranks on a host: so many carry a part of what all share */
    int most;     /* the largest */
    int first_tag;
    char *inbox; /* in the segment: blocks of ranks on other hosts */
    size_t inbox_bytes;
    /* the agreement about the call whose turn it is; only the first rank of each host is in it */
    int asking, level, levels;
    char *mine, *theirs; /* opinion and payload */
    char *sent;          /* the same, of each level, until MPI is done with it */
    mpp_parcel *calls;
    int call_count, awaited;
    size_t sent_bytes; /* at this level */
    /* chunks */
    mpp_flight flights[MAX_RING];
};

/* A chunk that goes to another host whole has at most this length: with Open MPI a message of more than 64 KiB over
 * TCP, its header included (btl_tcp_eager_limit), waits for an answer first. */
enum { MPP_EAGER = 60 << 10 };

/* The most that rides with an agreement; and of what is sent whole at every level, for the same reason. */
enum { MPP_PAYLOAD = 64 << 10, MPP_WHOLE_PAYLOAD = 32 << 10, MPP_HOST_TAGS = 16 };

static inline int mpp_local_count(const mpp_hosts *h, int host) { return h->first[host + 1] - h->first[host]; }
static inline int mpp_part_count(const mpp_hosts *h, int host) { return h->first_part[host + 1] - h->first_part[host]; }
static inline int mpp_leader_of(const mpp_hosts *h, int host) { return h->members[h->first[host]]; }

void mpp_hosts_free(mpp_hosts *hosts);
size_t mpp_hosts_bytes(mpp_hosts *hosts); /* of memory, the flights' included as far as they have some */

/* Under the lock. All set a failure of `s`, if MPI has one. */
void mpp_dispatch(shm_op *s, mpp_parcel *p, const void *buffer, size_t bytes, int peer, int tag);
void mpp_expect(mpp_parcel *p, void *buffer, size_t bytes, int peer, int tag);
/* Whether all of them are over. */
int mpp_delivered(shm_op *s, mpp_parcel *parcels, int count);
/* Forgets what has not been begun; whether MPI is done with all the rest, on every flight and in the agreement. */
int mpp_hosts_idle(shm_op *s);

/* One step of the agreement, once all ranks of this host have called; the opinion of all hosts when they agree or
 * disagree, else NULL. For the first rank of the host. */
const mpp_opinion *mpp_agree(shm_op *s);

/* `reproducible`: sums have the bits that they have on one host, wherever the ranks are. */
mpp_hosts *mpp_hosts_new(mpp_group *g, const int *host_of, int reproducible);

#endif
