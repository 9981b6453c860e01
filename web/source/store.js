// Stores conversations in this browser only: in IndexedDB, or in memory if that is not available.

const NAME = "penstock",
  TALKS = "conversations";
let opened = null;
const inMemory = new Map();

function open() {
  opened ??= new Promise((resolve) => {
    const asking = indexedDB.open(NAME, 1);
    asking.onupgradeneeded = () => asking.result.createObjectStore(TALKS, { keyPath: "id" });
    asking.onsuccess = () => resolve(asking.result);
    asking.onerror = () => resolve(null);
  }).catch(() => null);
  return opened;
}

async function run(mode, act) {
  const database = await open();
  if (!database) return null;
  return new Promise((resolve, reject) => {
    const asking = act(database.transaction(TALKS, mode).objectStore(TALKS));
    asking.onsuccess = () => resolve(asking.result);
    asking.onerror = () => reject(asking.error);
  });
}

/** Newest first. */
export async function loadAll() {
  const found = (await run("readonly", (talks) => talks.getAll())) ?? [...inMemory.values()];
  return found.sort((a, b) => b.updated - a.updated);
}

export async function save(talk) {
  inMemory.set(talk.id, talk);
  await run("readwrite", (talks) => talks.put(talk));
}

export async function remove(id) {
  inMemory.delete(id);
  await run("readwrite", (talks) => talks.delete(id));
}
