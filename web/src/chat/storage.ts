import type { Conversation } from "./types";

const NAME = "forebay";
const STORE = "conversations";
let opened: Promise<IDBDatabase> | null = null;

function database(): Promise<IDBDatabase> {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error ?? new Error("The browser keeps no data for this page."));
  });
  return opened;
}

async function run<T>(mode: IDBTransactionMode, act: (store: IDBObjectStore) => IDBRequest<T>): Promise<T> {
  const transaction = (await database()).transaction(STORE, mode);
  const request = act(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error ?? new Error("The browser could not keep this."));
  });
}

/** Loads all conversations stored in this browser, the newest first. */
export async function loadAll(): Promise<Conversation[]> {
  const all = await run<Conversation[]>("readonly", (store) => store.getAll());
  return all.sort((a, b) => b.updated - a.updated);
}

export async function save(conversation: Conversation): Promise<void> {
  await run("readwrite", (store) => store.put(conversation));
}

export async function remove(id: string): Promise<void> {
  await run("readwrite", (store) => store.delete(id));
}

/** The value under `key` in localStorage; null if there is none. */
export function recall<T>(key: string): T | null {
  try {
    return JSON.parse(localStorage.getItem(`forebay.${key}`) ?? "null") as T | null;
  } catch {
    return null;
  }
}

export function remember(key: string, value: unknown): void {
  try {
    localStorage.setItem(`forebay.${key}`, JSON.stringify(value));
  } catch {
    // The browser allows no storage: the value lasts until the page is left.
  }
}
